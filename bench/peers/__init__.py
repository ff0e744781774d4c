"""What users can train with: one table of peers."""
