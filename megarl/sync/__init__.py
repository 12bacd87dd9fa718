"""Moving the policy's weights into the generation servers, and the proof that they arrived."""
