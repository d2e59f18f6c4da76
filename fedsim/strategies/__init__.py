"""fedsim.strategies"""
