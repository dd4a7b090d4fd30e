"""Evaluation: how good labels are.

metrics       mIoU, TA, LA and BA of images
regions       boxes and boundaries of regions, for LA and BA; boxes of objects, where they are numbered
intervals     what an MRF adds, with its interval over images
dice          scores of volumes
temporal      temporal consistency of videos
calibration   confidence against accuracy, and the temperature that makes them agree
evaluate      predictors against data sets of images
videos        models against data sets of videos
submission    label maps for the servers of Cityscapes and VOC
models        models by name against data by name, and files of scores
steps         what each layer of a model makes of an image
explain       the HTML report of a model: what it has learned, and its layers at work
pictures      the HTML page of evaluated images: gains and failures
"""
