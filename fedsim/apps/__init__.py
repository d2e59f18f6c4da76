"""fedsim.apps"""
