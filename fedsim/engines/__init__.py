"""fedsim.engines"""
