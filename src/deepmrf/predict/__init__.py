"""Prediction: from image files, arrays and tensors to label maps.

segmenter   `deepmrf.load`: a model by name, ready for images of every kind
result      Segmentation: the labels of one image
regions     connected regions of a label map; label maps without small or unsure ones
pipeline    many image files: read ahead, compute, write behind
remote      images and results at URLs: fetch, segment, upload
polygons    outlines of the regions, exact to the pixel
coco        the regions of label maps as COCO's JSON
report      PredictReport: what became of the files
files       which image files the inputs name, and where their results go
notes       what a result file says of its image and model
scales      predictors: averages over scales, mirror images and models
tiles       large images and volumes, tile by tile
frames      a sliding window over the frames of a video
ahead       work in threads, ahead of and behind the main thread
installation    versions, devices, kernels, caches and extras, for `deepmrf doctor`
"""
