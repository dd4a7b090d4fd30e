"""Label maps in the form that the servers of Cityscapes and VOC score.

    cityscapes   FOLDER/CITY_SEQUENCE_FRAME.png with the ids of *_labelIds.png
    voc          FOLDER/results/VOC2012/Segmentation/comp6_test_cls/NAME.png with VOC's palette

comp6 is VOC's competition for networks that have seen other data, such as ImageNet. Maps have their images' size.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from deepmrf.data.cityscapes import LABEL_IDS
from deepmrf.data.dataset import Dataset
from deepmrf.data.labels import CITYSCAPES, VOC
from deepmrf.data.progress import Progress, no_progress
from deepmrf.data.writing import replacing
from deepmrf.predict.scales import Predictor

VOC_FOLDER = Path("results", "VOC2012", "Segmentation", "comp6_test_cls")


@torch.inference_mode()
def write_submission(
    predict: Predictor,
    data: Dataset,
    folder: Path,
    device: torch.device | str = "cpu",
    progress: Progress = no_progress,
) -> list[Path]:
    """Write the label map of each image but frames between labelled ones; masks are not read. Return the files."""
    if data.labels.names not in (CITYSCAPES.names, VOC.names):
        raise ValueError("Submissions are for the labels of Cityscapes and VOC: give data of cityscapes or voc.")
    items = [item for item in data if item.mask is not None]
    paths = []
    for done, item in enumerate(items, start=1):
        image = torch.from_numpy(data.read_image(item)).permute(2, 0, 1)[None]
        labels = predict(image.to(device)).argmax(1)[0].to(torch.uint8).cpu().numpy()
        if data.labels.names == CITYSCAPES.names:
            path, picture = folder / f"{item.name}.png", Image.fromarray(np.array(LABEL_IDS, dtype=np.uint8)[labels])
        else:
            path, picture = folder / VOC_FOLDER / f"{item.name}.png", Image.fromarray(labels)
            picture.putpalette(VOC.palette().tobytes())
        with replacing(path) as file:
            picture.save(file, "PNG")
        paths.append(path)
        progress(done, len(items))
    return paths
