#pragma once
#import <Foundation/Foundation.h>

@class MTLCaptureManager;
