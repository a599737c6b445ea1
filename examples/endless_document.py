"""A document of any length, read in one context: the memory is the pattern's, not the length's.

python examples/endless_document.py
"""

import torch

from longnet.evaluation.losses import read_losses
from longnet.model import LongNetCache, LongNetConfig, LongNetForCausalLM

torch.manual_seed(0)
config = LongNetConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    attention=[{"name": "dilated", "segment_lengths": [256, 1024], "dilation_rates": [1, 4]}],
)
model = LongNetForCausalLM(config).eval()
cache = LongNetCache(config)
document = torch.randint(256, (1, 16384))
total, tokens = 0.0, 0
with torch.inference_mode():
    for begin, losses, _ in read_losses(model, document, piece=4096, cache=cache):
        total, tokens = total + losses.sum().item(), tokens + losses.numel()
        print(f"{begin + losses.shape[1]:>6,} tokens read, cache {cache.num_bytes / 1024:.0f} KiB")
print(f"mean loss {total / tokens:.3f} nats a token")
