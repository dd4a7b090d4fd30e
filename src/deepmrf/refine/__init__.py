"""Refinement: an MRF on predictions that any network has saved.

fit           learn an MRF and score it by cross-validation
folds         images that are held out together
search        choose kernel, gate, label scaling and steps within a budget of minutes
learn         stages 2 and 3 on random crops of examples
all_pairs     stage 2 of kernel="global": the numbers of a dense CRF's step, by trying
tally         the scores of label maps
score         folders of predictions against masks
settings      how large the MRF is, and how it is learned
report        the MRF and its scores; saving them
opening       the MRF to refine with: a saved one, or a preset, which is a dense CRF by name
cluster       `deepmrf.cluster`: predictions, and refining them, shared between the machines of a Ray cluster
address       is there a Ray cluster at this address?
apply         refine a folder of predictions with an MRF, and write label maps and probabilities
changes       the pixels of each label before and after
remote        predictions and results at URLs: fetch, refine, upload
examples      the images that a fit learns from
matching      predictions, images and masks of one name
predictions   find and read the files of a prediction
decode        from the numbers in those files to log-probabilities
soft_masks    grey pictures as probabilities of the foreground
label_ids     the ids that stand for labels in masks and label maps
"""
