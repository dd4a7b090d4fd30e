"""Prediction: from image files, arrays and tensors to label maps.

segmenter   `deepmrf.load`: a model by name, ready for images of every kind
result      Segmentation: the labels of one image
scales      averages over scales, mirror images and models
tiles       large images and volumes, tile by tile
files       image files in, result files out
pipeline    many image files: read ahead, compute, write behind
notes       what a result file says of its image and model
devices     which device computes
"""
