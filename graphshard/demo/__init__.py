"""Train one language model twice, by eager FSDP2 and by graphshard, and compare every step.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m graphshard.demo

Imports what users import: `graphshard` itself and `testing`.
"""
