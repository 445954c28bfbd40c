"""A page that answers how much GPU memory the training of a published architecture takes, in the reader's browser.

One file without requests: the package's timelines and cards, and a script that replays them as the package does.
`make docs` writes it into the site, `make known-page` by itself.

    python tools/known_page.py [--out FILE] [NAME ...]
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from vram_guard.budget import Budget
from vram_guard.budget.catalogue import catalogue
from vram_guard.budget.margins import NETWORKS
from vram_guard.capture.named_optimizer import WORDS
from vram_guard.closed_form.inputs import InputSizes, sample_shape, sizes_read
from vram_guard.files import write_atomically
from vram_guard.known.architectures import LENGTH_STEP, Architecture, architectures, texts_of
from vram_guard.known.form import unpacked
from vram_guard.language import CHINESE, ENGLISH, _, speaking
from vram_guard.report.words import category_name
from vram_guard.scratch import threads_per_multiprocessor
from vram_guard.timeline import CATEGORIES, PHASE_NAMES, named_phase

ROOT = Path(__file__).parents[1]
#: The page without style, tables and scripts: pages of the documentation link to it.
TEMPLATE = ROOT / "docs" / "calculator.html"
#: Of the timelines that the page replays.
_TIER: Final = "symbolic"
PARTS = Path(__file__).parent / "calculator"


def page(names: Iterable[str] = ()) -> str:
    """The page as text.

    Args:
        names: of the architectures on it; none: all that have timelines.
    """
    chosen = set(names)
    known = [one for one in architectures() if texts_of(one.name) and (not chosen or one.name in chosen)]
    tables = {"": _facts(known), **{one.name: _trainings(one) for one in known}}
    data = "\n".join(
        f'<script type="text/plain" data-table="{name}">{_deflated(it)}</script>' for name, it in tables.items()
    )
    read = {one: (PARTS / one).read_text(encoding="utf-8") for one in ("page.css", "replay.js", "page.js")}
    parts = {
        "style": f"<style>\n{read['page.css']}</style>",
        "tables": data,
        "scripts": f"<script>\n{read['replay.js']}\n{read['page.js']}</script>",
    }
    return re.sub(
        r"<!-- (style|tables|scripts) -->", lambda found: parts[found[1]], TEMPLATE.read_text(encoding="utf-8")
    )


def on_post_build(config: Mapping[str, Any]) -> None:
    """The hook of MkDocs: the page with its tables takes the place of the template in the site."""
    write_atomically(Path(config["site_dir"]) / TEMPLATE.name, page())


def _deflated(table: Any) -> str:
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False)
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def _facts(known: Iterable[Architecture]) -> dict[str, Any]:
    """What is not of one architecture: their names, the cards, words."""
    return {
        "step": LENGTH_STEP,
        "architectures": {one.name: one.parameters for one in known},
        "cards": [_card(gpu.name, gpu.architecture) for gpu in reversed(catalogue())],
        "categories": {name: _in_both(category_name, name) for name in CATEGORIES},
        "phases": {name: _in_both(named_phase, name) for name in PHASE_NAMES},
        "optimizers": {name: _in_both(_, text) for name, text in WORDS.items()},
    }


def _in_both(said: Callable[..., object], *about: object) -> list[str]:
    """In English and in Chinese."""
    found = []
    for language in (ENGLISH, CHINESE):
        with speaking(language):
            found.append(str(said(*about)))
    return found


def _card(name: str, group: str) -> dict[str, Any]:
    budget = Budget.resolve(gpu=name)
    assert budget.compute_capability is not None
    return {
        "name": name,
        "group": group,
        "capability": _number(budget.compute_capability),
        "processors": budget.multiprocessors,
        "threads": threads_per_multiprocessor(budget.compute_capability),
        "placement": budget.placement,
        "usable": {network: budget.for_tier(_TIER, network).usable for network in NETWORKS},
        "explained": {
            network: _in_both(lambda kind: budget.for_tier(_TIER, kind).explain(), network) for network in NETWORKS
        },
    }


def _number(capability: tuple[int, int]) -> int:
    return 10 * capability[0] + capability[1]


def _trainings(one: Architecture) -> dict[str, Any]:
    text = "seq_length" in sizes_read(one.config)
    shape = sample_shape(one.config, InputSizes())
    return {
        "length": shape[0] if text else None,
        "sample": "x".join(map(str, shape)),
        "own_loss": "_class_name" not in one.config,
        "trainings": [_training(key, texts) for key, texts in texts_of(one.name).items()],
    }


def _training(key: str, texts: Iterable[str]) -> dict[str, Any]:
    dtype, precision, *rest, optimizer = key.split()
    adapters = next((word for word in rest if word != "checkpointing"), "")
    return {
        "dtype": dtype,
        "precision": precision,
        "adapters": adapters,
        "checkpointing": "checkpointing" in rest,
        "optimizer": optimizer,
        "timelines": [_timeline(text) for text in texts],
    }


def _timeline(text: str) -> dict[str, Any]:
    """What decides over the peak, of :mod:`vram_guard.known.form`'s text; modules and lines of code do not."""
    document = json.loads(text)
    # Its kinds of blocks say what is asked here: without its hundred thousand blocks it is read in no time.
    found = unpacked(json.dumps({**document, "blocks": [], "modules": [], "events": []}), document["lengths"][0])
    assert found is not None
    kinds = [
        {"size": size, "category": category, "rule": rule, "unknown": unknown, "stream": stream}
        | {"operator": document["words"][operator][0]}
        for size, category, _source, operator, _optional, rule, unknown, stream in document["kinds"]
    ]
    beyond = {
        "streams": any(kind["stream"] for kind in kinds) or found.deferred,
        "phases": len(found.stretches) > 1,
        "tier": found.tier != _TIER,
        "network": found.network is None,
        "host": found.host_blocks,
        "transforms": any(kind["unknown"] and kind["operator"].startswith("aten._fft_") for kind in kinds),
    }
    return {
        "lengths": document["lengths"],
        "kinds": [[kind["size"], kind["category"], kind["rule"], kind["unknown"]] for kind in kinds],
        "blocks": document["blocks"],
        "events": document["events"],
        "capabilities": sorted({_number(found.compute_capability), *map(_number, document["capabilities"])}),
        "phases": [[phase.name, phase.step, phase.start] for phase in found.phases],
        "network": found.network,
        "releases": dict(found.releases.packages),
        "beyond": next((name for name, holds in beyond.items() if holds), ""),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "calculator.html", metavar="FILE")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of an architecture (default: all)")
    options = parser.parse_args()
    write_atomically(options.out, page(options.names))
