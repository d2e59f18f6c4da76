"""fedsim.reports"""
