"""Pure math on tensors: rewards, advantages, KL, losses, targets, diagnostics."""
