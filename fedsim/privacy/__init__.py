"""fedsim.privacy"""
