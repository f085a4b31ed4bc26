"""What the tests of detection share."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from PIL import Image

from bitcycle.dataset.detection import VocSmall

# ---------------------------------------------------------------------------------------------------- made-up data


def write_picture(folder, name: str, size: tuple[int, int], objects, number: int) -> None:
    """An image of `size` (width, height) whose objects (class, x1, y1, x2, y2) are boxes of their colour."""
    pixels = np.random.default_rng(number).integers(100, 130, (size[1], size[0], 3), dtype=np.uint8)
    lines = []
    for label, x1, y1, x2, y2 in objects:
        pixels[y1 - 1 : y2, x1 - 1 : x2] = 40 * (1 + sum(map(ord, label)) % 5)
        box = f"<xmin>{x1}</xmin><ymin>{y1}</ymin><xmax>{x2}</xmax><ymax>{y2}</ymax>"
        lines.append(f"<object><name>{label}</name><difficult>1</difficult><bndbox>{box}</bndbox></object>")
    Image.fromarray(pixels).save(folder / "JPEGImages" / f"{name}.jpg", quality=95)
    sides = f"<size><width>{size[0]}</width><height>{size[1]}</height><depth>3</depth></size>"
    (folder / "Annotations" / f"{name}.xml").write_text(f"<annotation>{sides}{''.join(lines)}</annotation>")


def write_voc(folder, splits: dict[str, int], classes: tuple[str, ...]) -> None:
    """Pascal VOC's layout with so many images in each split; portrait and landscape, with 0 to 2 objects."""
    for sub in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (folder / sub).mkdir(parents=True)
    numbers = itertools.count()
    for split, count in splits.items():
        names = []
        for _ in range(count):
            number = next(numbers)
            size = ((64, 48), (48, 64), (64, 40))[number % 3]
            objects = [
                (classes[number % len(classes)], 5, 5, 36, 36),
                (classes[(number + 1) % len(classes)], 9, 9, 24, 28),
            ]
            names.append(f"2012_{number:06}")
            write_picture(folder, names[-1], size, objects[: (number + 2) % 4 % 3], number)
        (folder / "ImageSets" / "Main" / f"{split}.txt").write_text("\n".join(names) + "\n")


def write_voc_small(data_root) -> None:
    write_voc(
        data_root / "voc-small" / "VOCdevkit" / "VOC2007", {"train": 70, "val": 25, "test": 25}, VocSmall().class_names
    )


@pytest.fixture(autouse=True)
def users_cache(tmp_path, monkeypatch):
    """Small archives are unpacked there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "users_cache"))
