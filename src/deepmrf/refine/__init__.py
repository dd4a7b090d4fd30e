"""Refinement: an MRF on predictions that any network has saved.

fit           learn an MRF (stages 2 and 3) and score it by cross-validation
apply         refine a folder of predictions with it
predictions   find and match predictions, images and masks
decode        what the numbers in prediction files mean
examples      the images that a fit learns from
folder        the MRF on disk
"""
