"""Images, videos and their masks: the common datasets, or a folder of your own.

    dataset = open_data("camvid:data/camvid", "train")
    image, mask = dataset.read(dataset[0])          # (H, W, 3) and (H, W) of uint8, void is 255

labels       LabelSet: names, colours and the void id; VOC, ANIMALS, CITYSCAPES, CAMVID
colours      choose_colours: colours that people can tell apart, for labels without them
files        read image and mask files
images       as_image: a path, PIL image, array or tensor as RGB
volumes      read and write NIfTI volumes
dataset      Item and Dataset: a list of images and how to read them
voc, camvid, cityscapes, coco, folder, synthetic    one function each that returns a Dataset
opening      open_data: a Dataset from a spec such as "voc:PATH"
transforms   Augment: random views of clips
check        check: everything that is wrong with a dataset, as a DataReport
download     get: fetch a dataset from its publisher, and unpack it safely; publications has the addresses
weights      get_weights: ImageNet weights for recipes, from the Hugging Face hub
extras       packages that some commands need, and how to install them
writing      write files atomically
remote       files at URLs, such as s3://bucket/photos: list, fetch, upload
spelling     did_you_mean: which known word a wrong one was meant to be
progress     Progress: how long work reports how far it is
"""

from deepmrf.data.camvid import camvid
from deepmrf.data.check import DataReport, check
from deepmrf.data.cityscapes import cityscapes
from deepmrf.data.coco import coco
from deepmrf.data.dataset import Dataset, Item
from deepmrf.data.download import get
from deepmrf.data.files import DataError
from deepmrf.data.folder import folder, write_folder
from deepmrf.data.labels import ANIMALS, CAMVID, CITYSCAPES, VOC, LabelSet
from deepmrf.data.opening import open_data
from deepmrf.data.synthetic import synthetic
from deepmrf.data.transforms import Augment
from deepmrf.data.voc import add_sbd, animals, voc

__all__ = [
    "ANIMALS",
    "CAMVID",
    "CITYSCAPES",
    "VOC",
    "Augment",
    "DataError",
    "DataReport",
    "Dataset",
    "Item",
    "LabelSet",
    "add_sbd",
    "animals",
    "camvid",
    "check",
    "cityscapes",
    "coco",
    "folder",
    "get",
    "open_data",
    "synthetic",
    "voc",
    "write_folder",
]
