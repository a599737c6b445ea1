"""A LongNet in a training loop of your own: it is a torch module, and the loss never holds all logits.

python examples/own_training_loop.py
"""

import torch

from longnet.model import LongNetConfig, LongNetForCausalLM
from longnet.training.loss import linear_cross_entropy

torch.manual_seed(0)
config = LongNetConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=512,
    attention=[{"name": "dilated", "segment_lengths": [128, 512], "dilation_rates": [1, 4]}],
)
model = LongNetForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
# The same 128 tokens, four times: to be found again 128 positions back.
row = torch.randint(256, (4, 128)).repeat(1, 4)
for step in range(1, 31):
    hidden = model.hidden_states(row[:, :-1])
    sums = linear_cross_entropy(hidden.flatten(0, 1), model.lm_head.weight, row[:, 1:].flatten())
    loss = sums.loss / sums.tokens
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
