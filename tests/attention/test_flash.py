"""The library kernels keep the promise that the operator stands on.

They are private to torch. When one of these tests fails after an upgrade, `longnet/attention/flash.py` is the only
file to change.
"""

import pytest
import torch

from longnet.attention.flash import KERNELS, FlashKernel, choose_kernel

SCHEMAS = {
    "_scaled_dot_product_flash_attention_for_cpu": "query key value dropout_p is_causal attn_mask scale",
    "_scaled_dot_product_flash_attention_for_cpu_backward":
        "grad_out query key value out logsumexp dropout_p is_causal attn_mask scale",
    "_scaled_dot_product_cudnn_attention":
        "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask scale",
    "_scaled_dot_product_cudnn_attention_backward":
        "grad_out query key value out logsumexp philox_seed philox_offset attn_bias cum_seq_q cum_seq_k max_q max_k "
        "dropout_p is_causal scale",
    "_scaled_dot_product_flash_attention": "query key value dropout_p is_causal return_debug_mask scale",
    "_scaled_dot_product_flash_attention_backward":
        "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal philox_seed "
        "philox_offset scale",
    "_flash_attention_backward":
        "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal rng_state unused "
        "scale window_size_left window_size_right",
    "_scaled_dot_product_efficient_attention":
        "query key value attn_bias compute_log_sumexp dropout_p is_causal scale",
    "_scaled_dot_product_efficient_attention_backward":
        "grad_out_ query key value attn_bias out logsumexp philox_seed philox_offset dropout_p grad_input_mask "
        "is_causal scale",
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_private_signatures(name: str) -> None:
    schema = getattr(torch.ops.aten, name).default._schema
    assert " ".join(argument.name for argument in schema.arguments) == SCHEMAS[name]


def test_private_signature_that_only_grows_at_its_end() -> None:
    schema = torch.ops.aten._flash_attention_forward.default._schema
    wanted = "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask scale "
    wanted += "window_size_left window_size_right"
    assert " ".join(argument.name for argument in schema.arguments).startswith(wanted)


CPU_KERNELS = [(kernel, "cpu", torch.float64) for kernel in KERNELS if kernel.name in ("cpu flash", "math")]
GPU_KERNELS = [
    pytest.param(kernel, "cuda", torch.float32 if kernel.name in ("memory-efficient", "math") else torch.bfloat16,
                 marks=pytest.mark.gpu)
    for kernel in KERNELS if kernel.name != "cpu flash"
]  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "device", "dtype"), CPU_KERNELS + GPU_KERNELS, ids=lambda x: getattr(x, "name", None)
)
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_merged_backward_is_exact(
    kernel: FlashKernel, device: str, dtype: torch.dtype, group: int, causal: bool
) -> None:
    """(out, LSE) of a softmax over two blocks of keys, given to each block's backward, sum to its gradient."""
    length, scale = 100, 0.1
    q, grad = (torch.randn(2, length, 6, 64, device=device, dtype=dtype) for _ in range(2))
    k1, v1, k2, v2 = (torch.randn(2, length, 6 // group, 64, device=device, dtype=dtype) for _ in range(4))
    if reason := kernel.unsupported(q, k1):
        pytest.skip(reason)
    parts = [kernel.forward(q, k, v, causal, scale) for k, v in ((k1, v1), (k2, v2))]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    out = sum(o.to(lse.dtype) * (part - lse).exp().unsqueeze(-1) for o, part in parts).to(dtype)

    truth = [x.detach().double().requires_grad_() for x in (q, k1, v1, k2, v2)]
    tq, *tkv = truth
    keys, values = (torch.cat(pair, 1).repeat_interleave(group, 2) for pair in ((tkv[0], tkv[2]), (tkv[1], tkv[3])))
    scores = scale * torch.einsum("bnhd,bmhd->bhnm", tq, keys)
    if causal:
        visible = torch.ones(length, length, device=device, dtype=torch.bool).tril()
        scores = scores.masked_fill(~torch.cat((visible, visible), 1), -torch.inf)
    expected = torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1), values)
    dq, *dkv = torch.autograd.grad(expected, truth, grad.double())

    found1 = kernel.backward(grad, q, k1, v1, out, lse, causal, scale)
    found2 = kernel.backward(grad, q, k2, v2, out, lse, causal, scale)
    found = (out, lse, found1[0].double() + found2[0].double(), *found1[1:], *found2[1:])
    wanted = (expected, scores.logsumexp(-1).transpose(1, 2), dq, *dkv)
    limit = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1.5e-2}[dtype]
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours.double() - theirs).norm() < limit * theirs.norm()


def test_every_refusal_has_a_reason() -> None:
    q, k = torch.randn(1, 5, 6, 7), torch.randn(1, 5, 2, 7)
    for kernel in KERNELS:
        reason = kernel.unsupported(q, k)
        assert reason is None if kernel.name in ("cpu flash", "math") else reason
    assert choose_kernel(q, k).name == "cpu flash"
    assert choose_kernel(q.to("meta"), k.to("meta")).name == "math"


@pytest.mark.gpu
def test_cudnn_makes_no_plan_for_a_small_block_that_comes_once() -> None:
    q, k = (torch.empty(1, length, 8, 64, device="cuda", dtype=torch.bfloat16) for length in (1024, 3072))
    assert choose_kernel(q, k).name == "cudnn"
    assert choose_kernel(q, k, once=True).name == "flash"
    long = torch.empty(1, 2**17, 8, 64, device="cuda", dtype=torch.bfloat16)
    assert choose_kernel(long, long, once=True).name == "cudnn"
