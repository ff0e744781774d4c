"""Train one language model twice, by eager FSDP2 and by graphshard, and compare every step; or one, with checkpoints.

torchrun --standalone --nproc-per-node 2 -m graphshard.demo
torchrun --standalone --nproc-per-node 2 --max-restarts 3 -m graphshard.demo --checkpoint DIR --resume

Imports what users import: `graphshard` itself and `testing`.
"""
