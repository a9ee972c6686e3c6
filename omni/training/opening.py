"""What the screen says of a run before its first step."""

from collections.abc import Iterator

from dataloader.index import same_data
from infra.progress import LEGEND
from infra.run_folder import RunFolder
from omni.models.registry import notes_of, published
from omni.planning.mixture import repeats, told
from omni.planning.optim_schedule import frozen_components, stages_of
from omni.planning.pools import without_effect
from omni.planning.run_spec import RunSpec
from omni.planning.slower_in_bf16 import slower_in_bf16
from omni.planning.work import num_parameters
from omni.training.evaluate import left_out_of
from omni.training.figures import restarts
from omni.training.start import check_start
from ops.device import device_name, device_type, dtype_of, precision_of
from ops.grouped import is_one_product
from ops.kernels.choice import without_kernels


def opening(spec: RunSpec, folder: RunFolder, resumed: int | None, tracked: str) -> Iterator[str]:
    """Yield lines that say what trains on what, where, and how it is shown; `tracked` is where metrics go."""
    train, device, restart = spec.config.train, device_name(), restarts()
    start = _start(spec) if resumed is None else f"continued after step {resumed}"
    yield f"run folder {folder.path}"
    yield f"  model     {_model(spec)}"
    yield f"  data      {_data(spec)}"
    for text in told(spec.config.data):
        yield f"  mixture   {text}"
    yield (
        f"  ranks     {spec.arrangement.world} on {device}, {precision_of(train.precision)}: "
        f"{spec.arrangement.describe()}; {spec.policies['placement'].name}, {spec.policies['pipeline'].name}"
    )
    yield f"  tracking  {tracked}"
    yield f"  start     {start}, to step {train.steps}" + (
        f"; restart {restart} of {spec.config.launch.max_restarts}" if restart else ""
    )
    for text in _stages(spec):
        yield f"  stage     {text}"
    yield f"  every     {_cadence(spec)}"
    policies, own = without_effect(spec.planner.domain.sharing), notes_of(spec.encoders)
    for text in (*policies, *slower_in_bf16(spec), *own, *_notes(spec)):
        yield f"note: {text}"
    yield "columns of a step:"
    for title, meaning in LEGEND.items():
        yield f"  {title:9} {meaning}"


def _model(spec: RunSpec) -> str:
    llm = spec.config.model.llm
    counts = num_parameters(spec.config.model.llm, spec.encoders, spec.tokenizer.vocab_size)
    each = ", ".join(f"{name} {_count(count)}" for name, count in counts.items())
    experts = f", {llm.moe.experts} experts in a layer" if llm.mixture else ""
    sizes = f"{llm.layers} layers of width {llm.hidden}{experts}"
    return f"{_count(sum(counts.values()))} parameters: {each}; LLM of {sizes}"


def _data(spec: RunSpec) -> str:
    data = spec.config.data
    sources = ", ".join(
        f"{name} ({len(index):,} samples, weight {data.sources[name].weight})"
        for name, index in spec.indexes.items()
    )
    step = f"{data.step_tokens:,} tokens" if data.step_tokens else f"{data.step_samples} samples"
    heldout = f"; held out: {', '.join(spec.heldout)}" if spec.heldout else ""
    return f"{sources}; {step} a step{heldout}"


def _notes(spec: RunSpec) -> Iterator[str]:
    """What the user should know of the data, and of this GPU."""
    if device_type() == "cuda" and (why := without_kernels()) is not None:
        yield (
            f"norms, rotations, gates and losses are several kernels of torch's each, and hold more for a "
            f"moment than the plan's memory says: {why}"
        )
    llm, dtype = spec.config.model.llm, dtype_of(spec.config.train.precision)
    mixture = llm.mixture
    if mixture and device_type() == "cuda" and not is_one_product(dtype, llm.hidden, mixture.ffn):
        yield (
            f"experts are multiplied one after the other, and the host waits for each layer: one product for "
            f"all takes a GPU from Hopper on, bf16, and widths that are multiples of 8 (model.llm.hidden="
            f"{llm.hidden}, model.llm.moe.ffn={mixture.ffn})"
        )
    yield from repeats(spec.config.data, {name: len(index) for name, index in spec.indexes.items()})
    for name, index in {**spec.heldout, **spec.indexes}.items():
        if index.manifest.hash is None:
            yield (
                f"{name}: {index.path} has no hashes (format {index.manifest.format_version}), so other "
                f"labels of the same sizes pass unseen, on other nodes and when this run is resumed: omni "
                f"data hash {index.path}"
            )
    yield from left_out_of(spec)
    for name, heldout in spec.heldout.items():
        for source, index in spec.indexes.items():
            if same_data(heldout, index):
                yield (
                    f"held-out {name} is the data of source {source}: its loss and transcriptions say "
                    f"nothing of samples that were not trained on"
                )


def _start(spec: RunSpec) -> str:
    """Where weights come from: those of the run, of encoders that begin with a folder's, and no others'."""
    start, names = spec.config.start, check_start(spec)
    folders = {name: published(name, of) for name, of in spec.encoders.items() if name not in names}
    own = {name: of.url for name, of in folders.items() if of is not None}
    given = start.checkpoint or start.weights
    parts = [f"{name} with the weights of {url}" for name, url in own.items()]
    if given is not None:
        parts.insert(0, f"with the weights{' and the optimizer state' if start.optimizer else ''} of {given}")
    drawn = [name for name in spec.components if name not in names and name not in own]
    if not parts:
        return "from the start"
    if drawn:
        parts.append(f"{', '.join(drawn)} drawn anew")
    return f"{', '.join(parts)}, at position {start.cursor or 0} of the stream"


def _stages(spec: RunSpec) -> Iterator[str]:
    """Each stage, and what learns when it begins."""
    config = spec.config
    for stage in stages_of(config.optim, config.stages, config.train.steps):
        if stage.name:
            frozen = frozen_components(stage.optim.components, 1)
            learning = ", ".join(name for name in spec.components if name not in frozen)
            last = stage.first + stage.steps - 1
            yield f"{stage.name}, steps {stage.first} to {last}: {learning} learn"


def _cadence(spec: RunSpec) -> str:
    train = spec.config.train
    cadences = {
        "a checkpoint": train.checkpoint_every or train.steps,
        "an evaluation": train.eval_every,
        "a timeline": train.timeline_every,
    }
    said = [f"{what} every {every} steps" for what, every in cadences.items() if every]
    never = [what for what, every in cadences.items() if not every]
    return ", ".join([*said, *(f"never {what}" for what in never)])


def _count(number: int) -> str:
    """Three digits and a unit: 851 k, 7.24 M, 70.6 B."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
