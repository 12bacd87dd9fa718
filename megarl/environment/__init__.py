"""Environments: what answers the policy within an episode. `Environment` is the class to derive from."""

from megarl.environment.interface import Action, Environment, EpisodeSetting, Observation, Step

__all__ = ["Action", "Environment", "EpisodeSetting", "Observation", "Step"]
