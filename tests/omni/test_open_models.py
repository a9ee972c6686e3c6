"""Published weights under any layout against transformers, and back to their files."""

import contextlib
import hashlib
import json
import os
from math import prod
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from open_model_folders import FAMILIES, in_double, make, transformers
from quantised_folders import make_fp8, make_mxfp4
from ranks import RankPool
from small import with_values

from dataloader.format import Sample
from dataloader.storage import Storage
from dataloader.tokenizer import ByteTokenizer
from dataloader.writer import DatasetWriter
from infra.checkpoint import complete, read_manifest
from infra.run_folder import RunFolder
from omni.__main__ import main
from omni.compose import compose_config
from omni.config import Config, ConfigError
from omni.models.regions import Region
from omni.open_models.folder import open_folder
from omni.open_models.reads import Read
from omni.open_models.rules import VOCABULARY
from omni.planning.prepare import prepare_run
from omni.rank import folder_weights
from omni.rank.state import pieces_of
from omni.training.export import readers, whole
from omni.training.export_folder import export_folder
from omni.training.parity import collect
from omni.training.trainer import Trainer

TOLERANCE = 1e-5
TEXTS = ("a short one", "x", "some more words, in a longer text than the others are " * 2, "and the last")
# Links that cost nothing, so that it pays to share sequences as short as these.
FREE = {
    **{"cluster.link_latency_ns": 0, "cluster.node_link_latency_ns": 0, "cluster.op_overhead_ns": 0},
    **dict.fromkeys(("cluster.link_bytes_per_s", "cluster.node_link_bytes_per_s"), 10**12),
}
LAYOUTS = {
    "one": {},
    "tp2": {"layout.llm.tp": 2},
    "pp2": {"layout.llm.pp": 2},
    "cp2": {"layout.llm.cp": 2},
    "ep2": {"layout.llm.ep": 2},
    "tp2 dp2": {"layout.llm.tp": 2},
    "shared": {"layout.domain": 2, "llm_sp.policy": "all"},
    "zero3": {"layout.domain": 2, "layout.llm.zero": 3},
    "cp2 dynamic": {"layout.llm.cp": 2, "llm_sp.policy": "dynamic", **FREE},
    "joint": {"layout.llm.pp": 2, "pipeline.policy": "joint"},
}
MIXTURES = ("mixtral", "qwen3_moe")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts"
    with DatasetWriter(path, ByteTokenizer(), rows_per_group=4) as writer:
        for text in TEXTS:
            writer.add(Sample(text[:5], text))
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders and models by family, made when first asked for."""
    made: dict[str, tuple[Path, torch.nn.Module]] = {}

    def model(family: str) -> tuple[Path, torch.nn.Module]:
        if family not in made:
            folder = tmp_path_factory.mktemp("model") / family
            made[family] = folder, make(family, folder)
        return made[family]

    return model


def configured(data: Path, folder: Path, run: Path, *more: str) -> Config:
    return compose_config(
        [
            "~experiment",
            "system=multiplexed",
            f"start.weights='{folder}'",
            f"+data.sources.texts.path={data}",
            "data.microbatch_tokens=160",
            f"data.step_samples={len(TEXTS)}",
            "train.steps=1",
            "train.precision=fp32",
            "train.timeout_s=60",
            "optim.lr=1e-3",
            "tracking=jsonl",
            f"run.dir='{run}'",
            *more,
        ]
    )


def trained(rank: int, config: Config, world: int) -> tuple[float, dict[str, torch.Tensor] | None, int]:
    """Begin with the folder, save that, and compute a step. Returns its loss and gradients, and the bytes of
    the folder that this rank has read.
    """
    readers = []
    make_reader = folder_weights.FolderReader.__init__

    def noting(self, *args):
        make_reader(self, *args)
        readers.append(self)

    folder_weights.FolderReader.__init__ = noting
    try:
        folder = RunFolder.create(Path(config.run.dir))
        trainer = Trainer(prepare_run(config, world), folder, rank, torch.device("cpu"))
        trainer.saving.restore()
    finally:
        folder_weights.FolderReader.__init__ = make_reader
    trainer.saving.save(trainer.reporter)
    trainer.saving.finish(trainer.reporter)
    with trainer.ahead() as ahead:
        done = trainer.run_step(trainer.begin(ahead, 1))
        found = collect(trainer, lambda own: own.grad)
    trainer.control.barrier("the end")
    trainer.close()
    return done.totals.loss, found, readers[0].bytes


def expected(model: torch.nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean loss of the texts, one sequence each, and its gradients by name on disk."""
    model.zero_grad()
    total, targets = torch.zeros((), dtype=model.dtype), 0
    for text in TEXTS:
        ids = torch.tensor([256, *text.encode(), 257])
        total = total + F.cross_entropy(model(ids[None, :-1]).logits[0], ids[1:], reduction="sum")
        targets += len(ids) - 1
    (total / targets).backward()
    return float(total.detach()) / targets, on_disk(
        {name: p.grad for name, p in model.named_parameters()}, model
    )


def expected_in_double(model: torch.nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    """The same, computed in fp64."""
    with in_double(model) as exact:
        return expected(exact)


def on_disk(tensors: dict[str, torch.Tensor], model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """In memory the experts of a layer are one tensor, in most files one each."""
    found = {}
    if model.is_fused:
        return tensors
    mixtral = model.config.model_type == "mixtral"
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        disk = stem.replace(".mlp.", ".block_sparse_moe.") if mixtral else stem
        gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        if last == "gate_up_proj":
            for expert, both in enumerate(tensor):
                found[f"{disk}.{expert}.{gate}.weight"], found[f"{disk}.{expert}.{up}.weight"] = both.chunk(2)
        elif last == "down_proj":
            found |= {f"{disk}.{expert}.{down}.weight": one for expert, one in enumerate(tensor)}
        elif mixtral and name.endswith(".mlp.gate.weight"):
            found[name.replace(".mlp.", ".block_sparse_moe.")] = tensor
        else:
            found[name] = tensor
    return found


def as_theirs(folder: Path, ours: dict[str, torch.Tensor], targets: int) -> dict[str, torch.Tensor]:
    source, found = open_folder(str(folder)), {}
    for key, flat in ours.items():
        rule = source.rules[key.partition("@")[0].removeprefix("llm/")]
        flat, pad = flat[: prod(rule.shape)], flat[prod(rule.shape) :]
        assert not pad.any(), "rows of padding learn nothing"
        if (slab := rule.slab) is not None:
            one = flat.view(rule.shape) / targets
            one = torch.stack(one.chunk(2), 1).flatten(0, 1) if slab.parts == 2 else one
            found.setdefault(rule.theirs[0], {})[slab.index] = one.t() if slab.transposed else one
            continue
        for name, runs in zip(rule.theirs, rule.runs, strict=True):
            found[name] = Region(rule.shape, 0, runs).cut(flat.view(rule.shape)) / targets
    return {
        name: torch.stack([of[at] for at in sorted(of)]) if isinstance(of, dict) else of
        for name, of in found.items()
    }


def size(folder: Path) -> int:
    """Bytes of the tensors of a folder."""
    return sum(of.stop - of.start for of in open_folder(str(folder)).tensors.values())


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".py"}


SHORT = [
    ("gpt_oss", "cp2"),
    ("qwen2", "one"),
    ("gemma3_text", "tp2 dp2"),
    ("llama tied", "pp2"),
    ("llama odd", "tp2"),
    ("llama all biases", "zero3"),
]
LONG = [(family, "one") for family in FAMILIES if family != "qwen2"]
LONG += [(family, "tp2") for family in ("llama tied", "qwen2", "qwen3_moe")]
LONG += [("olmo3", "tp2 dp2"), ("smollm3", "pp2"), ("qwen2_moe", "tp2 dp2"), ("qwen2_moe", "ep2")]
LONG += [("qwen3_moe", "ep2"), ("gpt_oss", "tp2 dp2"), ("gpt_oss", "pp2"), ("gpt_oss", "ep2")]
LONG += [
    ("mistral windows", "cp2"),
    ("gpt_oss", "shared"),
    ("gemma3_text", "joint"),
    ("gpt_oss", "cp2 dynamic"),
]
LONG += [("gemma3_text", "pp2"), ("gemma3_text", "cp2"), ("llama all biases", "tp2 dp2")]
LONG += [("qwen3", "tp2 dp2"), ("llama 3.1", "pp2"), ("qwen2 yarn", "tp2"), ("qwen2 windows", "pp2")]
LONG += [("qwen2 odd", "tp2 dp2"), ("qwen2 odd", "pp2"), ("llama odd", "joint")]
LONG += [("qwen2_moe", "zero3"), ("qwen3_moe", "pp2"), ("qwen3", "cp2"), ("mixtral", "ep2")]
CASES = [*SHORT, *(pytest.param(*case, marks=pytest.mark.slow) for case in LONG)]


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_a_step_is_that_of_transformers_and_the_files_come_back(
    ranks: RankPool, data, models, tmp_path, family, layout
):
    folder, model = models(family)
    world = {"one": 1, "tp2 dp2": 4}.get(layout, 2)
    config = with_values(configured(data, folder, tmp_path / "run"), LAYOUTS[layout])
    results = ranks.run(world, trained, config, world)
    loss, gradients, _ = results[0]
    plain_loss, plain = expected_in_double(model)
    targets = sum(len(text) + 1 for text in TEXTS)
    assert loss == pytest.approx(plain_loss, rel=TOLERANCE)
    found = as_theirs(folder, gradients, targets)
    norm = float(torch.stack([own.norm() for own in plain.values()]).norm())
    assert found.keys() == plain.keys()
    for name, own in found.items():
        away = float((own - plain[name]).norm()) / max(float(plain[name].norm()), 1e-6 * norm)
        assert away < TOLERANCE, f"{name}: {away:.1e}"
    assert sum(read for *_, read in results) == size(folder)  # all ranks are of one node
    storage = Storage.at(tmp_path / "run" / "checkpoints")
    manifest = read_manifest(storage, complete(storage)[-1])
    export_folder(storage, manifest, open_folder(str(folder)), tmp_path / "out")
    assert files(tmp_path / "out") == files(folder)
    if "odd" in family:
        check_padding(storage, manifest, folder, tmp_path)
    noted = json.loads((tmp_path / "run" / "weights.json").read_text())
    assert noted["files"].keys() == {name for name in files(folder) if name.endswith(".safetensors")}


def check_padding(storage: Storage, manifest: dict, folder: Path, where: Path) -> None:
    """Rows of padding are zeros, and a model that has ids in their place is another one."""
    for key, pieces in pieces_of(manifest["index"]).items():
        name = key.removeprefix("llm/")
        if name in VOCABULARY:
            with readers(storage, manifest) as reader:
                rows = whole(key, pieces, reader).reshape(280, 64)
            assert rows[272].any()
            assert not rows[273:].any()
    manifest["fingerprint"]["model.llm.vocab"] = 280
    with pytest.raises(ConfigError, match=r"has another model .* embedding.* has shape \(280, 64\)"):
        export_folder(storage, manifest, open_folder(str(folder)), where / "other")


def trained_on_nodes_of_one(rank: int, config: Config, world: int):
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    return trained(rank, config, world)


def test_each_node_reads_for_itself(ranks: RankPool, data, models, tmp_path):
    """Columns of a matrix are divided over two nodes: both read its rows."""
    folder, model = models("qwen2")
    config = with_values(configured(data, folder, tmp_path / "run"), LAYOUTS["tp2"])
    RunFolder(tmp_path / "run").hashes.mkdir(parents=True)
    results = ranks.run(2, trained_on_nodes_of_one, config, 2)
    assert not RunFolder(tmp_path / "run").hashes.exists(), (
        "hashes of the files that another launch began with"
    )
    assert results[0][0] == pytest.approx(expected(model)[0], rel=TOLERANCE)
    assert all(size(folder) / 2 < read < size(folder) for *_, read in results)


@pytest.mark.slow  # it starts a run
def test_a_run_in_bf16_comes_back_as_a_folder_that_transformers_loads(data, tmp_path, capsys):
    folder, run, out = tmp_path / "published", tmp_path / "run", tmp_path / "out"
    before = make("qwen2", folder, torch.bfloat16).state_dict()
    keys = [f"start.weights={folder}", f"+data.sources.texts.path={data}", f"run.dir={run}"]
    more = ["train.steps=2", f"data.step_samples={len(TEXTS)}", "data.microbatch_tokens=160"]
    ranks = ["layout.llm.tp=2", "launch.ranks=2", "optim.lr=0.1", "tracking=jsonl"]
    assert main(["train", "~experiment", "system=multiplexed", *keys, *more, *ranks]) == 0
    found = {path.stem: path.read_text().split()[0] for path in (RunFolder(run).hashes).iterdir()}
    assert found == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors")
    }
    (folder / "additional_chat_templates").mkdir()
    capsys.readouterr()
    assert main(["checkpoint", "export", str(run), "--as", "hf", "--out", str(out)]) == 0
    (note,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert note.endswith("is not copied: additional_chat_templates/, modeling_own.py")
    after = transformers.AutoModelForCausalLM.from_pretrained(out, local_files_only=True).state_dict()
    assert after.keys() == before.keys()
    assert all(after[name].dtype == torch.bfloat16 for name in after)
    assert all(not torch.equal(after[name].float(), before[name]) for name in after)
    names = {path.name for path in folder.iterdir() if path.is_file()} - {"modeling_own.py"}
    assert {path.name for path in out.iterdir()} == names
    assert main(["checkpoint", "export", str(run), "--as", "hf", "--out", str(out)]) == 2  # not empty
    make("llama", tmp_path / "other")
    line = ["checkpoint", "export", str(run), "--as", "hf", "--out", str(tmp_path / "two")]
    assert main([*line, "--like", str(tmp_path / "other")]) == 2
    make("qwen2", folder)  # in fp32: the folder is another one now
    capsys.readouterr()
    assert main(line) == 2
    assert "model-00001-of-" in (told := capsys.readouterr().err)
    assert "is not the file that the run began with" in told
    assert main([*line, "--like", str(folder)]) == 0


def test_a_file_that_cannot_be_read_is_noted_and_does_not_hold_up_others(models):
    folder, _ = models("llama")
    reader = folder_weights.FolderReader(open_folder(str(folder)))
    with contextlib.ExitStack() as reader.stack:
        assert not reader._read(Read("gone.safetensors", 0, 8, ())).any()
    assert "gone.safetensors" in (reader.problem or "")


def test_tensors_that_are_no_weights_are_copied_through(ranks: RankPool, data, tmp_path):
    folder, name = tmp_path / "published", "model.layers.0.self_attn.rotary_emb.inv_freq"
    make("llama", folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"][name] = "more.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    header = json.dumps({name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    content = len(header).to_bytes(8, "little") + header + b"anything"
    (folder / "more.safetensors").write_bytes(content)
    ranks.run(1, trained, configured(data, folder, tmp_path / "run"), 1)
    storage = Storage.at(tmp_path / "run" / "checkpoints")
    manifest = read_manifest(storage, complete(storage)[-1])
    export_folder(storage, manifest, open_folder(str(folder)), tmp_path / "out")
    assert files(tmp_path / "out") == files(folder)


@pytest.mark.parametrize(
    ("made", "layout"), [(make_mxfp4, "ep2"), pytest.param(make_fp8, "tp2", marks=pytest.mark.slow)]
)
def test_quantised_weights_are_read_as_transformers_reads_them_and_come_back_in_bf16(
    ranks: RankPool, data, tmp_path, made, layout
):
    folder, out = tmp_path / "published", tmp_path / "out"
    model = made(folder)
    config = with_values(configured(data, folder, tmp_path / "run"), LAYOUTS[layout])
    loss, gradients, _ = ranks.run(2, trained, config, 2)[0]
    plain_loss, plain = expected(model)
    assert loss == pytest.approx(plain_loss, rel=TOLERANCE)
    found = as_theirs(folder, gradients, sum(len(text) + 1 for text in TEXTS))
    for name, own in found.items():
        assert float((own - plain[name]).norm()) <= TOLERANCE * float(plain[name].norm()), name
    storage = Storage.at(tmp_path / "run" / "checkpoints")
    manifest = read_manifest(storage, complete(storage)[-1])
    export_folder(storage, manifest, open_folder(str(folder)), out)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == model.state_dict().keys()
    sizes = sum(of.stop - of.start for of in open_folder(str(out)).tensors.values())
    assert index["metadata"]["total_size"] == sizes
    again = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).state_dict()
    for name, value in model.state_dict().items():
        rounded = value.bfloat16().float() if is_quantised(folder, name) else value
        assert torch.equal(again[name], rounded), name


def is_quantised(folder: Path, name: str) -> bool:
    return open_folder(str(folder)).stored[name].scales is not None
