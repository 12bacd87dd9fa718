"""Ray, which no other room uses: placement of actors, fan-out of calls, deadlines, clean shutdown."""
