"""fedsim.partitions"""
