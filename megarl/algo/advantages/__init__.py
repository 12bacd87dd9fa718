"""Advantage estimators: one module for each choice of algo.advantage, which declares it as ADVANTAGE."""
