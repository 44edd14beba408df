"""The decoding loop: rounds of propose, verify, accept, commit and stop."""
