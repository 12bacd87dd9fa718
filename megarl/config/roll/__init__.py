"""ROLL's names (github.com/alibaba/ROLL) for our keys."""
