"""Ray: the only room that creates actors. Placement, fan-out, deadlines, clean ends."""
