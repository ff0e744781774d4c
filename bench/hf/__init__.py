"""Whether classes of `transformers` train bit for bit as under eager FSDP2: `__main__`.

Imports `harness`. The models are random and small: nothing is downloaded.
"""
