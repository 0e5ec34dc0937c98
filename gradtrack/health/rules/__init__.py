"""The health rules: those about the norm of the gradients, and those about values, the loss and the weights."""
