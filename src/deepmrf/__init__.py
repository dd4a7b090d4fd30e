"""deepmrf: a mean-field step of a high-order Markov random field as differentiable layers, behind any network."""

__version__ = "0.1.0"
