"""fedsim.mechanisms"""
