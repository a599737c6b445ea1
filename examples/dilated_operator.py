"""The operator alone: dilated attention beside dense attention, and how the cost grows with the length.

python examples/dilated_operator.py
"""

import time

import torch

from longnet.attention import DilationPattern, dilated_attention

for length in (1024, 2048, 4096):
    pattern = DilationPattern.geometric(length, base=256)
    q, k, v = torch.randn(3, 1, length, 4, 32)
    times = {}
    for name, kind in (("dilated", pattern), ("dense", DilationPattern.dense())):
        dilated_attention(q, k, v, kind)
        start = time.perf_counter()
        dilated_attention(q, k, v, kind)
        times[name] = time.perf_counter() - start
    share = pattern.edges(length, 4) / DilationPattern.dense().edges(length, 4)
    print(f"{length:>5} tokens: {share:.0%} of the pairs, {times['dilated'] / times['dense']:.2f} of dense's time")
