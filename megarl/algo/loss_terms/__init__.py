"""Further terms of the policy's loss: one module for each, which declares it as TERM."""
