"""The commands that README.md, CONTRIBUTING.md and docs/*.md print: which run as printed, with less, or not.

A command of a page is found where a line of a fenced block begins with `omni`, `python` or `srun`. What plans
and shows runs as printed, without an entry here, on small data by the same names, and so does a sweep, as
jobs that are written and not submitted. What starts ranks or needs a run has an entry in RANKS, and what
cannot run here in NOT_RUN.
"""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^(?:\$ )?((?:omni|python|srun) .*)$", re.MULTILINE)
_ALONE = (
    "plan",
    "compare",
    "layout",
    "data",
    "rehearse",
)  # commands of omni that start no ranks and need no run

ELSEWHERE = {"docs/extending.md": "tests/examples/test_extending.py runs the page's commands in order"}

# Printed commands that no test runs as they stand, by how they begin, and why.
NOT_RUN = {
    "omni calibrate": "measures for a minute: tests/e2e/test_calibrate.py does, with one rank",
    "omni plan --search": "seconds to minutes: tests/omni/test_layout_search.py searches smaller runs",
    "omni doctor": "its answer is of the machine at hand: tests/e2e/test_doctor.py has sound and faulty ones",
    "srun": "needs Slurm",
    "python benchmarks/": "measures for minutes",
    "python -m infra.agent": "needs several nodes: tests/e2e/test_by_hand.py",
    "omni train '~experiment' start.weights=": "needs a published model: tests/omni/test_open_models.py",
    "omni train experiment=mine 'data.tokenizer=": "needs a tokenizer of one: tests/omni/test_tuned_chats.py",
    "omni train '~experiment' +model/llm=tiny '+model.encoders.image={name: grid_tower": "needs a published "
    "tower: tests/omni/test_towers.py",
    "omni train '~experiment' +model/llm=tiny model.llm.hidden=2048": "needs a published tower: "
    "tests/omni/test_qwen_vit.py",
    "omni generate runs/tuned": "needs a published model: tests/omni/test_tuned_chats.py",
    "omni parity --against models/qwen": "needs a published model: tests/omni/test_against.py",
    "omni checkpoint export runs/tuned": "needs a published model: tests/omni/test_open_models.py",
    "omni checkpoint export runs/adapted": "needs a published model: tests/omni/test_lora.py",
    "omni data build --recipe quickstart_chat": "minutes: tests/e2e/test_tuned_models.py",
    "omni train experiment=quickstart_chat run.dir=runs/chat": "minutes: tests/e2e/test_tuned_models.py",
    "omni checkpoint export runs/chat ": "minutes: tests/e2e/test_tuned_models.py",
    "omni generate runs/chat ": "minutes: tests/e2e/test_tuned_models.py",
    "omni data build --recipe quickstart_open": "minutes: tests/e2e/test_tuned_models.py",
    "omni train experiment=quickstart_open run.dir=runs/open": "minutes: tests/e2e/test_tuned_models.py",
    "omni checkpoint export runs/open ": "minutes: tests/e2e/test_tuned_models.py",
    "omni generate runs/open ": "minutes: tests/e2e/test_tuned_models.py",
    "omni train -m hydra/launcher=slurm": "needs Slurm: tests/e2e/test_slurm.py",
    "omni train -m hydra/launcher=ray": "needs Ray: tests/e2e/test_ray.py",
    "omni train '+model.encoders.radar": "an encoder of the reader's own: tests/examples",
    "omni train 'train.checkpoint_dir=s3://": "needs an object store: tests/infra/test_checkpoints.py",
    "omni rehearse --dry --rank 0,37,127": "elided: the reader's own model and data",
    "omni sweep show": "of a sweep with its time: tests/e2e/test_sweeps.py",
    "omni rehearse --dry --trace": "minutes of a 70B: tests/omni/test_rehearsal.py rehearses a rank of it",
    "omni rehearse --dry --rank 37": "minutes of a 70B: tests/omni/test_rehearsal.py rehearses a rank of it",
    "omni rehearse --dry --device cuda": "compiles a device: tests/cuda/test_cuda_command.py",
}

# What ends with another code than 0, as its page says, and what it then names.
REFUSED = {
    "omni plan --trace longtail experiment=llama3_70b launch.ranks=1024 system=multiplexed "
    "data.microbatch_tokens=262144 data.step_tokens=4194304": (2, "would hold 112.1 GiB"),
}

_TINY = (
    "tracking=jsonl train.eval_every=0 data.heldout.strips.samples=2 data.heldout.strips.generate=0 "
    "data.heldout.docs.samples=2 data.step_tokens=256 train.timeout_s=60"
)
_TWO = f"{_TINY} train.steps=2"
_ONE = "launch.ranks=1"

_FEWER = "launch.ranks=64 data.step_tokens=16384"
_LLAMA = "omni plan --trace longtail experiment=llama3_70b launch.ranks=1024"

# Appended to those that run by themselves and would take long.
LESS = {
    _LLAMA: _FEWER,
    f"{_LLAMA} layout=tp8_pp4,tp8_cp2_pp4".replace("plan", "plan -m"): _FEWER,
    f"{_LLAMA} data.step_tokens=8388608 data.sample_tokens=16384": _FEWER,
    f"{_LLAMA} data.step_tokens=8388608 system=megatron": "data.step_tokens=131072",
    f"{_LLAMA} system=multiplexed data.step_tokens=262144,4194304 pipeline=encode_first,joint".replace(
        "plan", "plan -m"
    ): "launch.ranks=64 data.step_tokens=16384,32768",
    "omni plan --trace data/mine experiment=llama3_70b launch.ranks=1024": f"{_FEWER} data.step_tokens=4096",
    "omni plan --trace longtail experiment=llama3_70b model=llama3_1b_so400m model/llm=llama3_8b "
    "launch.ranks=64 layout.llm.tp=1 layout.llm.cp=1 layout.llm.pp=1 layout.domain=8 layout.llm.zero=3 "
    "model.llm.recompute=none data.step_tokens=2097152 data.sample_tokens=8192 "
    "data.microbatch_tokens=8192": "data.step_tokens=262144",
    "omni plan --trace longtail model=qwen2_5_vl_7b '~experiment' cluster=h100 launch.ranks=16 "
    "layout.llm.tp=2 layout.llm.pp=2 data.microbatch_tokens=8192 data.step_tokens=131072 "
    "data.on_long=truncate train.steps=1 optim.lr=1e-4": "data.step_tokens=32768",
    "omni plan --trace longtail model=llama3_1b_so400m model/llm=deepseek_v3 model/encoder=internvit_6b "
    "'~experiment' cluster=h100 cluster.memory_bytes=null launch.ranks=64 layout.llm.tp=2 layout.llm.pp=4 "
    "layout.llm.ep=16 data.microbatch_tokens=8192 data.step_tokens=262144 data.on_long=truncate "
    "train.steps=1 optim.lr=1e-4": "data.step_tokens=16384",
    "omni compare launch.ranks=4 layout=pp2": "data.step_tokens=2048 --systems megatron,dhp",
    "omni compare --trace longtail --mixtures 1:9,9:1 experiment=llama3_70b layout=tp8_pp4 "
    "launch.ranks=128 data.step_tokens=2097152": f"{_FEWER} --systems megatron,disttrain",
    "omni compare --ablate --systems omni --trace longtail --mixtures 1:9,9:1 cluster.memory_bytes=null "
    "experiment=llama3_70b layout=tp8_pp4 launch.ranks=128 "
    "data.step_tokens=2097152": "launch.ranks=32 data.step_tokens=16384 --mixtures 1:9",
    "omni data balance longtail experiment=llama3_70b launch.ranks=1024": "launch.ranks=64",
    "omni data balance data/mine --config-dir conf experiment=mine launch.ranks=512 "
    "--draw mine.svg": "launch.ranks=8",
}

# Commands that start ranks, or need a run, in the order in which a test runs them in one folder, each with
# what is appended so that it takes seconds.
RANKS = {
    "omni train layout=pp2 train.steps=100": _TWO,
    "omni train run.dir=runs/mine": f"{_TWO} {_ONE} train.timeline_every=1 train.checkpoint_every=1",
    "omni resume runs/mine train.steps=4000": "train.steps=3",
    "omni resume runs/mine": "train.steps=4",
    "omni resume runs/mine train.steps=4000 layout=pp2": "train.steps=5 launch.ranks=2",
    "omni eval runs/mine": "",
    "omni eval runs/mine '~data.heldout.docs' +data.heldout.mine.path=data/mine --out mine.json": "",
    "omni generate runs/mine --prompt 'one two'": "--tokens 2",
    "omni generate runs/mine --prompt 'one two' --prompt seven --tokens 64": "--tokens 2",
    "omni data remix runs/mine --from 4001 --add web=data/mine --weight web=2": "",
    "omni status runs/mine": "",
    "omni timeline runs/mine": "",
    "omni sync runs/mine": "",
    "omni parity --steps 3 launch.ranks=1 -- launch.ranks=2 layout=pp2": "",
    "omni train +data.sources.mine.path=data/mine model.encoders.image.patch=4": f"{_TWO} {_ONE}",
    "omni train +data.sources.mine.path=data/tars_index model.encoders.image.patch=4": f"{_TWO} {_ONE}",
    "omni train train.steps=100 launch.ranks=2 layout.domain=2 llm_sp=dynamic encoder_sp=dynamic": _TWO,
    "omni train train.steps=100 launch.ranks=3 placement=disaggregated placement.ranks=1": _TWO,
    "omni compare --measure 120 --systems omni,multiplexed,megatron layout=pp2 launch.ranks=2": (
        "data.step_tokens=256 train.timeout_s=60 --measure 1"
    ),
    "omni train '+optim.components.image={lr_scale: 0.1, frozen: [[1, 201]]}'": f"{_TWO} {_ONE}",
    "omni train run.dir=runs/align '+optim.components={llm: {frozen: [[1, 100000]]}}' train.steps=200 "
    "train.checkpoint_every=100": f"{_TWO} train.checkpoint_every=2",
    "omni resume runs/align --fork runs/all '~optim.components.llm' optim.lr=1e-4 train.steps=400": (
        "train.steps=2 train.checkpoint_every=2"
    ),
    "omni resume runs/all --fork runs/longer --optimizer --step 300 train.steps=800": "--step 2 "
    "train.steps=2",
    "omni train train.steps=100 train.timeline_every=50 layout=pp2 run.dir=runs/pp2": f"{_TWO} "
    "train.timeline_every=1",
    "omni timeline runs/pp2": "",
    "omni timeline runs/pp2 --step 50 --draw step50.svg": "--step 1",
    "omni train train.checkpoint_every=100 train.keep_checkpoints=2 train.keep_every=1000": f"{_TWO} {_ONE}",
    "omni train layout.llm.tp=2 layout.llm.pp=2 'launch.layouts=[{tp: 2}, {}]' launch.max_restarts=10 "
    "launch.ranks=4": _TWO,
}


def commands(page: str) -> list[str]:
    """The commands of a page in its order, without their comments, words apart by one space."""
    found = []
    for block in _BLOCK.findall(page):
        for line in _COMMAND.findall(block.replace("\\\n", " ")):
            found.append(" ".join(shlex.quote(word) if _quoted(word) else word for word in split(line)))
    return found


def split(command: str) -> list[str]:
    """The words of a command."""
    return shlex.split(command, comments=True)


def _quoted(word: str) -> bool:
    return not re.fullmatch(r"[\w@%+=:,./-]+", word)


def pages() -> dict[str, list[str]]:
    """The commands of every page whose commands are run here."""
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    named = {str(file.relative_to(ROOT)): commands(file.read_text()) for file in files}
    return {name: found for name, found in named.items() if found and name not in ELSEWHERE}


def why_not(command: str) -> str | None:
    """Why a command is not run, None if it is."""
    return next((why for begin, why in NOT_RUN.items() if command.startswith(begin)), None)


def runs_by_itself(command: str) -> bool:
    """Whether a command runs as printed, without ranks and without a run."""
    words = split(command)
    if words[0] != "omni" or why_not(command) or command in RANKS:
        return False
    alone = words[1] in _ALONE or "--help" in words or "--no-ranks" in words
    return alone or words[1:3] == ["train", "-m"]


def unaccounted(found: list[str]) -> list[str]:
    """Those commands of a page that nothing runs and that say no reason."""
    return [each for each in found if not (runs_by_itself(each) or each in RANKS or why_not(each))]
