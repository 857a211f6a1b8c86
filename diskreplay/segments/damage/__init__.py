"""What is damaged in a segment, rows without proof, and the quarantine."""
