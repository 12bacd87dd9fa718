"""Policy losses: one module for each choice of algo.surrogate, which declares it as POLICY_LOSS."""
