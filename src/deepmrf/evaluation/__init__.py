"""Evaluation: how good labels are.

metrics       mIoU, TA, LA, BA, temporal consistency
dice          scores of volumes
calibration   confidence against accuracy, and the temperature that brings them together
evaluate      models against data sets of images and videos
"""
