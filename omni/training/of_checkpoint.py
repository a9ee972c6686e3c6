"""One rank of those that evaluate or prompt a checkpoint, as torchrun starts it.

They are a run's ranks that begin with the weights of the checkpoint, take no step and save nothing.
"""

import contextlib
import sys
from functools import partial
from pathlib import Path
from typing import Any

from infra.lineage import end_with_parent

if __name__ == "__main__":
    end_with_parent()  # before the imports that take seconds

import numpy as np

from dataloader.prompts import SOURCE
from infra.checkpoint import locate
from infra.progress import Progress
from infra.run_folder import RunFolder
from infra.watchdog import EXIT_CODE as TRY_AGAIN
from omni.training.evaluate import left_out_of
from omni.training.forward import ForwardPasses
from omni.training.generate import FreeGeneration, Limit, Prompt
from omni.training.reporter import Silent
from omni.training.task import Task, write_result
from omni.training.trainer import Trainer
from omni.training.transcriptions import lines_of, summed_up


def evaluated(trainer: Trainer, step: int, screen: Progress | Silent) -> dict[str, Any]:
    """Held-out losses, and transcriptions of the sources that ask for them, summed up."""
    for text in left_out_of(trainer.spec):
        screen.note(f"note: {text}")
    found = {}
    for name, own in trainer.config.data.heldout.items():
        loss = trainer.evaluator.loss(step, name, own.samples, trainer.asked_to_stop)
        assert loss is not None, "until `trainer.stop` is entered, a signal ends a rank at once"
        found[f"loss/eval/{name}"] = loss
    losses = ", ".join(f"{key.rpartition('/')[2]} {loss:.4f}" for key, loss in found.items())
    screen.note(f"held-out loss of step {step}: {losses}")
    with trainer.stop:
        transcriptions = trainer.transcribe(partial(_show, trainer, screen), screen.note)
    summary: dict[str, Any] = found
    for name, results in transcriptions.items():
        summary |= summed_up(name, results)
        for line in lines_of(name, results):
            screen.note(line)
    return summary


def generated(trainer: Trainer, step: int, task: Task, screen: Progress | Silent) -> dict[str, Any]:
    """The tokens after each prompt that came to its end, by number."""
    prompts = [
        Prompt(meta, np.array(asked.ids, np.int64))
        for meta, asked in zip(task.trace, task.prompts, strict=True)
    ]
    passes = ForwardPasses(trainer.spec, trainer.rank, {SOURCE: task.items})
    generator = FreeGeneration(passes, trainer.control)
    limit = Limit(trainer.config.train.generate_s, trainer.stop, partial(_show, trainer, screen))
    with trainer.stop:
        stop = partial(limit.stop, "answers")
        tokens = generator.generate(step, prompts, task.most_tokens, frozenset(task.ends), stop)
    if (why := limit.left_off("answers")) is not None:
        screen.note(why)
    return {"answers": {str(number): list(of) for number, of in sorted(tokens.items())}}


def _show(trainer: Trainer, screen: Progress | Silent, name: str, done: int, of: int) -> None:
    trainer.watchdog.beat()  # a rank may wait for those of other domains
    screen.task(f"generating texts of {name}", done, of)


def main(config_path: Path) -> int:
    """Do the task of the folder as this process's rank; all ranks run this. Returns the exit code: TRY_AGAIN
    if a signal asked this one to stop.
    """
    from omni.compose import load_config
    from omni.training.seats import find_seat
    from omni.training.worker import joined

    folder = RunFolder(config_path.parent)
    task, config = Task.read(folder), load_config(config_path)
    assert config.start.checkpoint is not None
    _, step = locate(config.start.checkpoint)
    with joined(config_path, find_seat(config, folder), task.trace) as (spec, _, rank, device, plan_step):
        trainer = Trainer(spec, folder, rank, device, plan_step)
        screen = Progress(1) if rank == 0 else Silent()
        with contextlib.closing(trainer), contextlib.closing(screen), trainer.watchdog:
            trainer.saving.restore()
            result = (
                generated(trainer, step, task, screen) if task.prompts else evaluated(trainer, step, screen)
            )
            if rank == 0:
                write_result(folder, {"checkpoint": config.start.checkpoint, "step": step, **result})
            trainer.control.barrier("the end")
    return TRY_AGAIN if trainer.stop.requested else 0


if __name__ == "__main__":
    from omni.training.worker import exit_with

    exit_with(main, Path(sys.argv[1]))
