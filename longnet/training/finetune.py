"""What of a pretrained model is trained: everything, a part of it, or small adapters beside it."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from longnet.config.schema import FinetuneConfig

# transformers' models name their attention so.
ATTENTION = (".self_attn.", ".attention.", ".attn.")


def choose_trained(model: PreTrainedModel, options: FinetuneConfig) -> None:
    """Freezes what is not to be trained, or puts adapters in.

    Raises:
        ValueError: if nothing would be left to train, or an adapter's place does not exist.
    """
    if options.train == "lora":
        _add_adapters(model, options)
    elif options.train == "attention":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(part in name for part in ATTENTION))
    elif options.train == "no_embeddings":
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            module.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"finetune.train={options.train}: {type(model).__name__} has nothing of that name to train")


def merge_adapters(model: PreTrainedModel, options: FinetuneConfig, directory: Path) -> None:
    """Saves the adapters alone, as peft loads them, then adds them to the weights and takes them out."""
    if options.train != "lora":
        return
    from peft import get_peft_model_state_dict
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapters = get_peft_model_state_dict(model)
    directory.mkdir(exist_ok=True)
    # Under these names PeftModel.from_pretrained finds them.
    tensors = {f"base_model.model.{name}": tensor.contiguous().cpu() for name, tensor in adapters.items()}
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    _lora_config(options).save_pretrained(str(directory))
    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge(safe_merge=True)
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.get_base_layer())
    # peft leaves its config on the model, which would be saved as if the adapters were still there.
    for leftover in ("peft_config", "_hf_peft_config_loaded"):
        model.__dict__.pop(leftover, None)


def _add_adapters(model: PreTrainedModel, options: FinetuneConfig) -> None:
    from peft import inject_adapter_in_model

    # The loss takes the head's weight by itself, and would pass by its adapter.
    head = model.get_output_embeddings()
    linears = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    if wrong := sorted(set(options.lora_targets) - linears):
        raise ValueError(
            f"finetune.lora_targets has {wrong}: {type(model).__name__} has no such projections before its head; "
            f"expected some of {sorted(linears)}"
        )
    inject_adapter_in_model(_lora_config(options), model)


def _lora_config(options: FinetuneConfig):  # type: ignore[no-untyped-def]
    from peft import LoraConfig

    return LoraConfig(
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules=list(options.lora_targets),
        task_type="CAUSAL_LM",
    )
