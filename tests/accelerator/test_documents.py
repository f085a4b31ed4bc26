"""What documents say about GPUs says whether somebody has tried it."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT

ABOUT_GPUS = re.compile(r"\bGPUs?\b|\bcuda\b|\bCUDA\b|\bxpu\b|\bXPU\b|\bMetal\b")
TRIED_OR_NOT = re.compile(r"untested on hardware|never tried|H200", re.IGNORECASE)
PACKAGES = re.compile(r"(with|without|includes|installs) (CUDA|a GPU|GPU)|CUDA builds")
"""Of these it is known what they install, and what there is without."""


def sections(text: str) -> list[str]:
    """The parts of a page from one heading to the next, without code, generated parts, and tables and lists of links."""
    text = re.sub(r"```.*?```|<!-- generated.*?<!-- end -->", "", text, flags=re.DOTALL)
    text = "\n".join(line for line in text.splitlines() if not re.match(r"\s*[-|].*\]\(", line))
    return re.split(r"^(?=#)", text, flags=re.MULTILINE)


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))])
def test_sentences_about_gpus_say_whether_they_are_tried(page):
    for section in sections((ROOT / page).read_text()):
        sentences = [PACKAGES.sub("", sentence) for sentence in re.split(r"(?<=[.:])\s", section)]
        claims = [sentence for sentence in sentences if ABOUT_GPUS.search(sentence)]
        assert not claims or TRIED_OR_NOT.search(section), (
            f"nothing says whether this was tried on hardware: {claims[0]}"
        )
