"""A dense checkpoint of transformers becomes a LongNet: the same weights, another attention.

python examples/dense_to_dilated.py            (a small random Llama stands in for a downloaded one)
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from longnet.model import LongNetForCausalLM

torch.manual_seed(0)
llama = LlamaForCausalLM(
    LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
).eval()
longnet = LongNetForCausalLM.from_hf(llama, segment_lengths=[256, 1024], dilation_rates=[1, 4]).eval()
ids = torch.randint(256, (1, 1024))
with torch.no_grad():
    theirs, ours = llama(ids).logits, longnet(ids).logits
# Not quite the same even within the first segment: a key that two levels see counts twice.
print(f"logits differ by at most {(theirs - ours)[:, :256].abs().max():.3f} within the first segment,")
print(f"and by {(theirs - ours)[:, 256:].abs().max():.3f} beyond it, which fine-tuning is for")
