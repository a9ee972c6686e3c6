"""The recipe that docs/data.md shows, as a package would bring it."""

import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

from dataset_samples import image_item

from dataloader import registered
from dataloader.format import PLACEHOLDER, Sample
from dataloader.sources.build import build_index
from dataloader.sources.reader import PlacedReader

PAGE = Path(__file__).parents[2] / "docs/data.md"


def test_the_recipe_of_the_page_indexes_and_reads(tmp_path: Path, monkeypatch) -> None:
    (code,) = (
        code
        for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
        if "class Captions" in code
    )
    module = ModuleType("captions_of_the_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(code, str(PAGE), "exec"), module.__dict__)
    point = EntryPoint("captions", f"{module.__name__}:Captions", "omni.recipes")
    found = registered.installed
    monkeypatch.setattr(
        registered, "installed", lambda group: [*found(group), *[point] * (group == point.group)]
    )
    source = tmp_path / "source"
    (source / "pictures").mkdir(parents=True)
    items = {number: image_item(8, 8 * (1 + number), seed=number) for number in (0, 2, 3)}
    for number, item in items.items():
        (source / "pictures" / f"{number}.png").write_bytes(item.data)
    (source / "c.txt").write_text("ein Hund é\nno picture\n日本\nthe last")
    told: list[str] = []
    recipe = {"name": "captions", "folder": "pictures"}
    assert build_index(source, tmp_path / "index", recipe, tell=told.append)
    assert told[1].startswith("left out 1 for 'no file', such as c.txt/1 (pictures/1.png is no file")
    reader = PlacedReader(tmp_path / "index")
    texts = {0: "ein Hund é", 2: "日本", 3: "the last"}
    assert [reader.read(i, True, True) for i in range(3)] == [
        Sample(f"c.txt/{number}", PLACEHOLDER + text, (items[number],)) for number, text in texts.items()
    ]
