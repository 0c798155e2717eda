"""Training of a pocket target and its draft head: losses, optimiser and a resumable loop.

`target` and `head` hold the losses, `dispatch` the training-time mixture of experts, `optimizer`
the update rule, `loop` the steps, checkpoints, metrics and the loss curve that both share.
"""
