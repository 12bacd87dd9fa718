"""Value pretraining: the critic learns the frozen policy's returns before the first policy update."""
