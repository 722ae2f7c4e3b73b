"""Stages that live elsewhere: tiers, slots, and the copies between them."""
