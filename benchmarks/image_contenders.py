"""The outputs of the `web` recipe for pictures, by a plain loop over a library: what the platform
is held against. One process of it:  python image_contenders.py NAME OUT SOURCE …

Each makes the same files at the same settings from the same sources, turned upright, in sRGB and
without metadata; nothing is checked, hashed or stored durably.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

WIDTHS = (320, 640, 1280, 1920)
AVIF_QUALITY, AVIF_EFFORT, WEBP_QUALITY, WEBP_EFFORT, JPEG_QUALITY = 50, 2, 75, 4, 80


def by_libvips(source: Path, out: Path) -> None:
    """The same library as ours, in the quickest way that we know: one decode for all outputs."""
    import pyvips

    pyvips.cache_set_max(0)
    size = pyvips.Image.new_from_file(str(source))
    turned = size.get_typeof("orientation") and size.get("orientation") >= 5
    width, height = (size.height, size.width) if turned else (size.width, size.height)
    widths = sorted({min(width, w) for w in WIDTHS}, reverse=True)
    largest = pyvips.Image.thumbnail(
        str(source),
        widths[0],
        height=max(1, round(height * widths[0] / width)),
        size="force",
        export_profile="srgb",
    ).copy_memory()
    for width in widths:
        image = largest
        if width != largest.width:
            image = largest.thumbnail_image(width, height=10_000_000).copy_memory()
        name = str(out / f"w{width}")
        image.heifsave(
            f"{name}.avif", compression="av1", Q=AVIF_QUALITY, effort=AVIF_EFFORT, keep="none"
        )
        image.webpsave(f"{name}.webp", Q=WEBP_QUALITY, effort=WEBP_EFFORT, keep="none")
        flat = image.flatten(background=255) if image.hasalpha() else image
        flat.jpegsave(f"{name}.jpg", Q=JPEG_QUALITY, optimize_coding=True, keep="none")


def by_pillow(source: Path, out: Path) -> None:
    from PIL import Image, ImageCms, ImageOps

    with Image.open(source) as opened:
        opened.draft("RGB", (2 * WIDTHS[-1], 2 * WIDTHS[-1]))
        profile = opened.info.get("icc_profile")
        image = ImageOps.exif_transpose(opened).convert("RGB")
    widths = sorted({min(image.width, w) for w in WIDTHS}, reverse=True)
    size = (widths[0], round(image.height * widths[0] / image.width))
    largest = image.resize(size, Image.Resampling.LANCZOS, reducing_gap=2.0)
    if profile:
        made = ImageCms.profileToProfile(
            largest, ImageCms.ImageCmsProfile(io.BytesIO(profile)), ImageCms.createProfile("sRGB")
        )
        assert made is not None
        largest = made
    largest.info.clear()
    for width in widths:
        small = largest
        if width != largest.width:
            small = largest.resize(
                (width, round(largest.height * width / largest.width)), Image.Resampling.LANCZOS
            )
        name = str(out / f"w{width}")
        small.save(f"{name}.avif", quality=AVIF_QUALITY, speed=9 - AVIF_EFFORT, max_threads=1)
        small.save(f"{name}.webp", quality=WEBP_QUALITY, method=WEBP_EFFORT)
        small.save(f"{name}.jpg", quality=JPEG_QUALITY, optimize=True)


def by_vipsthumbnail(source: Path, out: Path) -> None:
    """The command line tool makes one file at a time, from the source each time."""
    for width in WIDTHS:
        for ending, options in (
            ("avif", f"Q={AVIF_QUALITY},effort={AVIF_EFFORT},strip"),
            ("webp", f"Q={WEBP_QUALITY},effort={WEBP_EFFORT},strip"),
            ("jpg", f"Q={JPEG_QUALITY},optimize_coding,strip"),
        ):
            target = f"{out}/w{width}.{ending}[{options}]"
            subprocess.run(
                ["vipsthumbnail", str(source), "-s", f"{width}x>", "-e", "srgb", "-o", target],
                check=True,
                env={**os.environ, "VIPS_CONCURRENCY": "1"},
            )


SHARP = f"""
const sharp = require('sharp'); const fs = require('fs');
sharp.concurrency(1); sharp.cache(false);
const [out, ...sources] = process.argv.slice(2);
(async () => {{
  for (const source of sources) {{
    const largest = await sharp(source, {{ limitInputPixels: false }}).rotate()
      .resize({{ width: {WIDTHS[-1]}, withoutEnlargement: true }}).toColourspace('srgb')
      .raw().toBuffer({{ resolveWithObject: true }});
    const raw = {{ raw: largest.info }};
    const widths = [...new Set([{",".join(map(str, WIDTHS))}].map(
      w => Math.min(w, largest.info.width)))];
    for (const width of widths) {{
      const small = await sharp(largest.data, raw).resize({{ width }}).raw()
        .toBuffer({{ resolveWithObject: true }});
      const made = () => sharp(small.data, {{ raw: small.info }});
      await made().avif({{ quality: {AVIF_QUALITY}, effort: {AVIF_EFFORT} }})
        .toFile(`${{out}}/w${{width}}.avif`);
      await made().webp({{ quality: {WEBP_QUALITY}, effort: {WEBP_EFFORT} }})
        .toFile(`${{out}}/w${{width}}.webp`);
      await made().jpeg({{ quality: {JPEG_QUALITY}, optimiseCoding: true }})
        .toFile(`${{out}}/w${{width}}.jpg`);
    }}
  }}
}})();
"""

PYTHON: dict[str, Callable[[Path, Path], None]] = {
    "libvips": by_libvips,
    "pillow": by_pillow,
    "vipsthumbnail": by_vipsthumbnail,
}


def main() -> None:
    name, out, *sources = sys.argv[1:]
    for source in sources:
        PYTHON[name](Path(source), Path(out))


if __name__ == "__main__":
    main()
