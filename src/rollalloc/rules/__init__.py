"""Rules that several recipes share. Each rule is a frozen value; each file holds the rules of one slot."""
