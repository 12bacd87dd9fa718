"""Moving the policy's weights into the generation servers, and verification that they arrived."""
