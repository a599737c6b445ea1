"""Evaluation while a model is trained."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer
from rich.console import Console

from longnet.config.schema import EvaluationConfig
from longnet.data import Corpus
from longnet.evaluation.evaluate import plan
from longnet.evaluation.text import validation_text
from longnet.model import LongNetForCausalLM

from .module import LongNetModule
from .rundir import RunDirectory
from .steps import StepCallback
from .throughput import TrainingClock


class Evaluations(StepCallback):
    """Every ``options.every`` steps and at the end, leaves an evaluation in the run's directory, as `step-N`.

    The first process evaluates; the others wait for it, as for a validation. Nothing of the run depends on it: no
    random number is drawn, and the clock of the training stands still.
    """

    def __init__(
        self, options: EvaluationConfig, corpus: Corpus, run: RunDirectory, clock: TrainingClock, console: Console
    ) -> None:
        super().__init__()
        self.options = options
        self.text = validation_text(corpus)
        self.run = run
        self.console = console
        self._clock = clock

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # What cannot be measured is to be known before the first step.
        plan(_language_model(pl_module), self.text, self.options)

    def on_step_end(self, trainer: Trainer, module: LightningModule, validated: bool) -> None:
        if trainer.global_step % self.options.every and trainer.global_step < trainer.max_steps:
            return
        model = _language_model(module)
        self._clock.stop(model.device)
        if trainer.is_global_zero:
            was_training = model.training
            model.eval()
            # The pieces of a text have many lengths: compiling for each would take longer than computing it.
            with trainer.precision_plugin.forward_context(), torch.compiler.set_stance("force_eager"):
                results = plan(model, self.text, self.options).run()
            model.train(was_training)
            results.facts["step"] = trainer.global_step
            results.save(self.run.evaluation / f"step-{trainer.global_step}")
            self.console.print(f"evaluated at step {trainer.global_step}", highlight=False)
        trainer.strategy.barrier("evaluation")
        self._clock.start()


def _language_model(module: LightningModule) -> LongNetForCausalLM:
    assert isinstance(module, LongNetModule)
    assert isinstance(module.model, LongNetForCausalLM)
    return module.model
