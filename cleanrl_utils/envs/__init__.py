"""The environment boundary as a library: see `base` for what a training loop, a wrapper and a back end agree on."""
