"""What happens in a store while others write it: looked at again and again, read-only."""
